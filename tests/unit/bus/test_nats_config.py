"""bin/nats-config: what it refuses, and what it keeps. tests/integration/security has its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.bus.nats_server import config as nats_config


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """Return the one line with which the command refuses."""
    with pytest.raises(SystemExit) as ended:
        nats_config.main(["demo", "--directory", str(folder), *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("option", ["--tls-client-ca", "--tls-cluster-ca"])
def test_an_authority_without_a_certificate_is_refused_and_no_open_server_is_written(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, tmp_path / "nats", option, "ca.pem", "--cluster", "a", "b", "c")
    assert f"{option} needs --tls-certificate and --tls-key" in line
    assert not (tmp_path / "nats").exists()


def test_an_authority_of_routes_without_a_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tls-certificate", "cert.pem", "--tls-key", "key.pem", "--tls-cluster-ca", "ca.pem")
    assert "--tls-cluster-ca is for the routes of --cluster" in refused(capsys, tmp_path, *words)
