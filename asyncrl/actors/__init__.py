"""The loops of each process: thin asyncio code over ports, without vendor APIs or mathematics."""
