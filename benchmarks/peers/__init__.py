"""asyncrl and other frameworks behind the same scripted engine and the same timed learner."""
