"""Assembles the servers of frozen models ([servers.NAME]), and what a worker knows of them."""

from __future__ import annotations

from asyncrl.actors.model_server import ModelServerActor
from asyncrl.actors.rollout.server_book import ServerBook, ServerFollower
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.messages.control import ServerAddress


def model_server_actor(run: RunConfig, name: str, *, bus: Bus) -> ModelServerActor:
    """Return the actor of [servers.NAME], which starts the server. Raises ConfigError."""
    return ModelServerActor(name, bus, server=registry.model_server(run, name, host=bus.own_address))


def server_book(run: RunConfig) -> ServerBook:
    """Return the addresses of all servers of the run, as far as the run file says them."""
    return ServerBook(
        {
            name: None
            if section.is_ours
            else ServerAddress(name=name, url=section.url.rstrip("/"), model=section.model or name, key=section.api_key)
            for name, section in run.servers.items()
        }
    )


def server_followers(run: RunConfig, worker: str, *, bus: Bus, book: ServerBook) -> list[ServerFollower]:
    """Return the actor that keeps ``book`` current, if the run starts any server."""
    names = tuple(run.started_servers)
    return [ServerFollower(f"{worker}.servers", bus, book=book, servers=names)] if names else []
