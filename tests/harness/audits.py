"""The output of `asyncrl audit --json`, computed in this process. This saves two seconds of imports.

tests/integration/test_audit.py checks that the command prints the same and ends with the same exit code.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.audit.account import account_of


def audited(run_directory: Path, *, token: str = "") -> dict[str, Any]:
    """Return the account, with the exit code under "code". Blocks. token: of the bus at bus.url"""
    with ThreadPoolExecutor(1) as beside:  # this thread may already run an event loop
        account = beside.submit(account_of, run_directory, token=token).result()
    found: dict[str, Any] = json.loads(json.dumps(account.as_json()))
    return found | {"code": 0 if account.is_clean else 1}
