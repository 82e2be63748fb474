"""Decision rules as pure functions on arrays, without asyncio, I/O, a clock or global state."""
