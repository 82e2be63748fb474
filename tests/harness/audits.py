"""What `asyncrl audit --json` says of a run, without a process of its own, which imports for two seconds.

That the command says this, and ends with that exit code: tests/integration/test_audit.py.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.run.recorded.account import account_of


def audited(run_directory: Path, *, token: str = "") -> dict[str, Any]:
    """The account, and under "code" the exit code. Blocks. token: of the bus at bus.url"""
    with ThreadPoolExecutor(1) as beside:  # an event loop may run in our thread
        account = beside.submit(account_of, run_directory, token=token).result()
    found: dict[str, Any] = json.loads(json.dumps(account.as_json()))
    return found | {"code": 0 if account.is_clean else 1}
