"""Who starts the processes of a run, one file a launcher, all behind ``port.Launcher``. app.py's table names them."""
