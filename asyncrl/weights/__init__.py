"""Weight channels: adapters of the WeightChannel port, which carry new weights to the engines."""
