"""`asyncrl certify RUN_DIR --version N`: what a version of the model was made from, in one JSON file.

The file joins the digests of the weights, of the data, and of the reward's and all other code that the run named;
settings and packages of every start; every trained group with its sampler, the versions that sampled it, its age and
rewards; and every group that was not trained, with the reason. A branch names its parent. Needs
checkpoint.keep_log = true.

`asyncrl certify --check FILE` computes it again from the run's log, weights and checkpoints and names every difference;
exit code 1 if there is one. --sign KEY signs the file with ssh-keygen (FILE.sig), and --check with --signers
ALLOWED_SIGNERS verifies who did.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import present

NAMESPACE: Final = "asyncrl"
MOST_SHOWN: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN_DIR", type=Path, nargs="?", help="the run's folder")
    parser.add_argument(
        "--version", type=int, metavar="N", help="policy version (default: that of the newest checkpoint)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/certificate-N.json; - is stdout")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="sign with this SSH key")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compute the file again, and compare")
    parser.add_argument("--signers", type=Path, metavar="FILE", help="with --check: who may have signed (ssh-keygen)")


def run(options: argparse.Namespace) -> int:
    if options.check is not None:
        return check(options.check, options.run_directory, signers=options.signers)
    if options.run_directory is None:
        raise ConfigError("certify: name a run's folder, or a file with --check")
    if options.signers is not None:
        raise ConfigError("--signers: goes with --check")
    if options.sign is not None and not options.sign.is_file():
        raise ConfigError(f"--sign {options.sign}: no such key; ssh-keygen -t ed25519 makes one")
    if options.sign is not None and str(options.out) == "-":
        raise ConfigError("--sign: signs a file; name one with --out")
    found = certify(options.run_directory, version=options.version)
    text = json.dumps(found, indent=1) + "\n"
    if str(options.out) == "-":
        print(text, end="")
        return 0
    out = options.out or options.run_directory / f"certificate-{found['version']}.json"
    out.write_text(text)
    if options.sign is not None:
        _ssh_keygen(
            "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(options.sign), str(out), what=f"--sign {options.sign}"
        )
    groups = sum(len(step["groups"]) for step in found["steps"])
    print(f"{out}: version {found['version']}, {groups} trained groups, sha256 {found['sha256'][:12]}...")
    return 0


def certify(directory: Path, *, version: int | None) -> dict[str, Any]:
    from asyncrl.audit.certificate import certificate

    recorded = RecordedRun(directory)
    saved = recorded.checkpoint()  # before the history: the run may be up
    history, settings = present(recorded.history()), recorded.newest_settings()
    if version is None:  # a version without a checkpoint loses its weights to weights.keep
        newest = max((entry.step for entry in history if entry.kind == "trained"), default=0)
        version = saved[0].step if saved and saved[0].step else newest
    work = functools.partial(certificate, recorded, history, version=version)
    found: dict[str, Any] = json.loads(json.dumps(recorded.on_bus(settings, work, token=arguments.bus_token())))
    return found


def check(file: Path, directory: Path | None, *, signers: Path | None) -> int:
    """Compute a certificate again and compare. Return the exit code. Raises ConfigError."""
    from asyncrl.audit.certificate import differences

    try:
        said = json.loads(file.read_text())
        place, version = Path(said["directory"]), int(said["version"])
    except OSError as error:
        raise ConfigError(f"--check {file}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"--check {file}: is no certificate of `asyncrl certify`") from None
    if signers is not None:
        _verify(file, signers)
    different, missing = differences(said, certify(directory or place, version=version))
    for line in different[:MOST_SHOWN]:
        print(f"DIFFERENT: {line}")
    if len(different) > MOST_SHOWN:
        print(f"and {len(different) - MOST_SHOWN} more")
    for line in missing[:MOST_SHOWN]:
        print(f"not checked: {line}")
    if len(missing) > MOST_SHOWN:
        print(f"and {len(missing) - MOST_SHOWN} more not checked")
    if not different:
        print(f"{file}: version {version} is as certified")
    return int(bool(different))


def _verify(file: Path, signers: Path) -> None:
    signature = file.with_name(f"{file.name}.sig")
    if not signature.exists():
        raise ConfigError(f"--signers: {signature} is not there; sign the file with --sign KEY")
    found = _ssh_keygen(
        *("-Y", "find-principals", "-s", str(signature), "-f", str(signers)), what=f"--signers {signers}: {file}"
    )
    signer = found.splitlines()[0]
    with file.open("rb") as content:
        _ssh_keygen(
            *("-Y", "verify", "-n", NAMESPACE, "-s", str(signature), "-f", str(signers), "-I", signer),
            what=f"--signers {signers}: {file}",
            stdin=content,
        )
    print(f"signed by {signer}")


def _ssh_keygen(*words: str, what: str, stdin: Any = subprocess.DEVNULL) -> str:
    """Run ssh-keygen and return its output. Raises ConfigError with its last line."""
    if shutil.which("ssh-keygen") is None:
        raise ConfigError(f"{what}: ssh-keygen is not installed")
    done = subprocess.run(["ssh-keygen", *words], stdin=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"{what}: {said[-1]}")
    return done.stdout
