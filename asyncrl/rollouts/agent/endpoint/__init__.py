"""An endpoint for agents: a model server that speaks several dialects and records each token that was sampled.

server.py has one HTTP server for a worker and a session for each sample; session.py makes prompts, has them answered,
and keeps the turns; template.py goes on from sampled tokens without tokenising them again; sequences.py makes of the
turns what is trained; dialects/ has one file for each protocol.
"""
