"""An endpoint for agents: a model server that speaks several dialects and records every sampled token.

server.py       one HTTP server per worker, with one session per sample
session.py      builds prompts, samples the answers, and keeps the turns
chat_format.py  how to write, read and continue a conversation without tokenising sampled tokens again: with a chat
                template (parsers.py) or a renderer (renderer.py)
turns.py        turns the session's turns into training sequences
dialects/       one file per protocol
"""
