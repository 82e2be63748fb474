"""bin/nats-config: what it refuses, and what it keeps. tests/integration/security has its servers."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sync-seconds inf", "--sync-seconds must be in 0..86400, got inf"),
        ("--sync-seconds nan", "--sync-seconds must be in 0..86400, got nan"),
        ("--sync-seconds 1e10", "--sync-seconds must be in 0..86400, got 10000000000.0"),
        ("--max-message-bytes -5", "--max-message-bytes must be in 1..1073741824, got -5"),
        ("--max-message-bytes 1073741825", "--max-message-bytes must be in 1..1073741824, got 1073741825"),
        ("--listen nonsense", "--listen must be HOST:PORT with a port of at most 65535, got 'nonsense'"),
        ("--listen ::1:4222", "--listen must be HOST:PORT with a port of at most 65535, got '::1:4222'"),
        ("--listen a:65536", "--listen must be HOST:PORT with a port of at most 65535, got 'a:65536'"),
        ("--tls-certificate none.pem --tls-key none.key", "--tls-certificate: none.pem: no such file"),
        ("--cluster a:99999 b c", "--cluster: ports must be in 1..65535, got 'a:99999'"),
        ("--cluster a:4222:0 b c", "--cluster: ports must be in 1..65535, got 'a:4222:0'"),
        ("--cluster a:4222:4222 b c", "--cluster takes three (or five) servers, each at another address"),
        ("--workers -1", "--workers must be in 0..65536, got -1"),
        ("--join a/b", "--join 'a/b': a worker's name here has at most 100 letters, digits, -, _ and ."),
        ("--cluster a a:4222:7000 c", "--cluster takes three (or five) servers, each at another address"),
    ],
)
def test_a_value_with_which_no_server_starts_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, tmp_path / "nats", *words.split()) == f"bin/nats-config: {said}"
    assert not (tmp_path / "nats").exists()


@pytest.mark.parametrize("listen", ["127.0.0.1:-1", ":4222", "[::1]:4222", "nats.example.org:0"])
def test_what_nats_server_listens_to_is_taken(listen: str, tmp_path: Path) -> None:
    write(tmp_path, "--listen", listen)
    assert json.loads((tmp_path / "nats-server.conf").read_text())["listen"] == listen


# -- credentials that are there ----------------------------------------------------------------------------------------


def write(folder: Path, *words: str) -> dict[str, str]:
    """Run the command for a run `demo`. Return the text of each file in the run's folder."""
    nats_config.main(["demo", "--directory", str(folder), *words])
    return {path.name: path.read_text() for path in (folder / "demo").iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b"demo-observer:", b"demo-observer: \n", b"demo-learner:pass", b"\xff\xfe"]
)
def test_a_file_without_a_password_is_refused_and_nothing_is_written(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    before = (tmp_path / "demo" / "learner").read_bytes()
    (tmp_path / "demo" / "observer").write_bytes(data)
    assert f"{tmp_path}/demo/observer: " in refused(capsys, tmp_path, "--cluster", "a", "b", "c")
    assert (tmp_path / "demo" / "learner").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "nats-server.conf"}


def test_the_password_of_the_servers_is_kept_and_a_damaged_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def clusters() -> list[dict[str, str]]:
        write(tmp_path, "--cluster", "a", "b", "c")
        texts = [(tmp_path / f"server-{number}" / "nats-server.conf").read_text() for number in (1, 2, 3)]
        return [json.loads(text)["cluster"]["authorization"] for text in texts]

    first, *others = clusters()
    assert others == [first, first] and clusters() == [first] * 3
    (tmp_path / "routes.password").write_text("")
    assert "routes.password: does not begin with" in refused(capsys, tmp_path, "--cluster", "a", "b", "c")


def test_workers_keep_their_passwords_and_leave_with_their_file(tmp_path: Path) -> None:
    def users() -> set[str]:
        config = json.loads((tmp_path / "nats-server.conf").read_text())
        return {user["user"] for account in config["accounts"].values() for user in account.get("users", ())}

    write(tmp_path, "--workers", "1", "--join", "gpu7", "gpu8.rack")
    roles = {"demo-learner", "demo-operator", "demo-observer", "demo-workers/w0", "demo-workers/e0"}
    assert users() == roles | {"demo-workers/gpu7", "demo-workers/gpu8.rack"}
    before = (tmp_path / "demo" / "workers" / "gpu7").read_text()
    (tmp_path / "demo" / "workers" / "gpu8.rack").unlink()
    write(tmp_path, "--workers", "1")
    assert users() == roles | {"demo-workers/gpu7"}
    assert (tmp_path / "demo" / "workers" / "gpu7").read_text() == before


def test_files_that_stay_keep_their_owner_and_mode_when_a_run_is_added(tmp_path: Path) -> None:
    """Whoever adds a run may be another user than those who run the first one."""
    write(tmp_path)
    kept = tmp_path / "demo" / "workers" / "w0"
    kept.chmod(0o640)
    before = kept.stat()
    nats_config.main(["demo", "more", "--directory", str(tmp_path)])
    assert (kept.stat().st_ino, kept.stat().st_mode) == (before.st_ino, before.st_mode)
