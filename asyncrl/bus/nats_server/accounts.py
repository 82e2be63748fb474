"""The NATS accounts of a run: the learner's, with JetStream, and one without JetStream for each other role.

A nats-server checks the subject that a client publishes to, but not the reply subject. In a shared account, a worker
could have any reply stored in any stream. So other roles reach the learner's account only through imports: services
(JetStream requests, subjects of streams that the role publishes to) and subjects that the role follows. A reply subject
belongs to the role's own account, which has no streams. The users' permissions repeat the rules inside each account.
"""

from __future__ import annotations

from typing import Any

from asyncrl.bus.nats_server.rights import Right, rights
from asyncrl.messages.topics import ROLES


def account_name(run: str, role: str) -> str:
    """Name of a role's account. The learner's is the run's name, as when all roles shared one account, so that existing
    streams are found."""
    return run if role == "learner" else f"{run}:{role}"


def accounts(run: str) -> dict[str, dict[str, Any]]:
    """Return the server configuration of each account, without users."""
    exports: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {run: {"jetstream": "enabled"}}
    for role in ROLES[1:]:
        name, imports = account_name(run, role), []
        for subject, export in _exports(rights(role, run=run)).items():
            exports.setdefault(subject, export | {"accounts": []})["accounts"].append(name)
            kind = "stream" if "stream" in export else "service"
            imports.append({kind: {"account": run, "subject": subject}})
        found[name] = {"imports": imports}
    found[run]["exports"] = list(exports.values())
    return found


def permissions(role: str, *, run: str) -> dict[str, Any] | None:
    """Return the NATS permissions of a role's user in its account; None if everything is allowed."""
    if role == "learner":
        return None
    publish: dict[str, None] = {}
    subscribe: dict[str, None] = {}
    for right in rights(role, run=run):
        publish |= dict.fromkeys((*right.requests, *right.streamed, *right.sends))
        subscribe |= dict.fromkeys((*right.follows, *right.hears))
    return {"publish": {"allow": list(publish)}, "subscribe": {"allow": list(subscribe)}}


def _exports(found: list[Right]) -> dict[str, dict[str, Any]]:
    exports: dict[str, dict[str, Any]] = {}
    for right in found:
        exports |= {subject: {"service": subject} for subject in right.requests}
        exports |= {subject: {"service": subject, "response_type": "Stream"} for subject in right.streamed}
        exports |= {subject: {"stream": subject} for subject in right.follows}
    return exports
