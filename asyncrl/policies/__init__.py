"""Decision rules as pure functions on arrays: no asyncio, no I/O, no clock, no globals."""
