"""Weight channels, which carry new weights to the engines: adapters of the WeightChannel port."""
