"""The processes' loops: thin asyncio over ports, no vendor, no mathematics."""
