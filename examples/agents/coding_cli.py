"""Plays a task with Claude Code or Codex, unchanged, in a folder of its own: python coding_cli.py claude, or codex.

The agent is to leave its answer in answer.txt; that it is the label is the reward, which goes to REWARD_FILE because
the agent prints what the model says. Both have their tools switched on without questions: put them below bubblewrap
(docs/guides/environments.md), or confine the worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAMPS = {"Koro": 7, "Mava": 3, "Tilo": 5}
LIMIT_SECONDS = 600


def command(agent: str, question: str, variables: dict[str, str]) -> list[str]:
    if agent == "claude":
        return ["claude", "-p", question, "--model", variables["ANTHROPIC_MODEL"], "--allowedTools", "Bash,Read,Write"]
    provider = {"name": "worker", "base_url": variables["OPENAI_BASE_URL"], "env_key": "OPENAI_API_KEY"}
    settings = {"model_provider": "worker", "model": variables["OPENAI_MODEL"]}
    settings |= {f"model_providers.worker.{key}": value for key, value in provider.items()}
    settings |= {"model_providers.worker.wire_api": "responses"}
    settings |= {"web_search": "disabled", "features.multi_agent": False}  # tools that OpenAI's own service runs
    flags = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    # Its own sandbox needs rights that a worker may not have.
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *flags, question]


def main() -> None:
    task = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        (work / "lamps.json").write_text(json.dumps(LAMPS))
        variables = os.environ | {"HOME": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        question = f"{task['prompt']} It is in lamps.json. Write the number alone to answer.txt."
        done = subprocess.run(
            command(sys.argv[1], question, variables),
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        answer = work / "answer.txt"
        said = answer.read_text().strip() if answer.exists() else ""
    reward = float(said == str(task["label"]))
    Path(os.environ["REWARD_FILE"]).write_text(json.dumps({"reward": reward}))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
