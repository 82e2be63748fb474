"""An endpoint for agents: a model server that speaks several dialects and records each token that was sampled.

server.py has one HTTP server for a worker and a session for each sample; session.py makes prompts, has them answered,
and keeps the turns; chat_format.py says how a conversation is written, read, and continued from sampled tokens, which
are not tokenised again: by a chat template (template.py, parsers.py) or a renderer (renderer.py); turns.py makes of the
turns what is trained; dialects/ has one file for each protocol.
"""
