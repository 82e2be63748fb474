"""The NATS accounts and users of a run: the learner's account, with JetStream, and one without JetStream for each other
role. Every rollout worker is a user of its own in the workers' account, and every server of a frozen model in the
servers', which may write only under its name.

A nats-server checks the subject that a client publishes to, but not the reply subject. In a shared account, a worker
could have any reply stored in any stream. So other roles reach the learner's account only through imports: services
(JetStream requests, subjects of streams that the role publishes to) and subjects that the role follows. A reply subject
belongs to the role's own account, which has no streams. The users' permissions repeat the rules inside each account.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.bus.nats_server.rights import ANY, Right, rights
from asyncrl.messages.topics import NAMED_ROLES, ROLES


def account_name(run: str, role: str) -> str:
    """Name of a role's account. The learner's is the run's name."""
    return run if role == "learner" else f"{run}:{role}"


def user_name(run: str, user: str) -> str:
    """Name at the server of a role, of a worker ("workers/w0"), or of a server of a frozen model ("servers/judge")."""
    return f"{run}-{user}"


def worker_user(name: str) -> str:
    """The user of a rollout worker, and its credentials file in the folder of its run."""
    return f"{NAMED_ROLES['rollout-worker']}/{name}"


def server_user(name: str) -> str:
    """The same of a server of a frozen model."""
    return f"{NAMED_ROLES['model-server']}/{name}"


def accounts(run: str, passwords: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the server configuration of each account. ``passwords``: role, "workers/NAME" or "servers/NAME" ->
    password"""
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
    for user, password in passwords.items():
        folder, _, name = user.rpartition("/")
        role = next((role for role, its in NAMED_ROLES.items() if its == folder), user)
        allowed = permissions(role, run=run, worker=name if folder else ANY)
        made = {"user": user_name(run, user), "password": password} | ({"permissions": allowed} if allowed else {})
        found[account_name(run, role)].setdefault("users", []).append(made)
    return found


def permissions(role: str, *, run: str, worker: str = ANY) -> dict[str, Any] | None:
    """Return the NATS permissions of a role's user in its account; None if everything is allowed."""
    if role == "learner":
        return None
    publish: dict[str, None] = {}
    subscribe: dict[str, None] = {}
    for right in rights(role, run=run, worker=worker):
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
