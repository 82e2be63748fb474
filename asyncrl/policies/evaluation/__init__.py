"""What an evaluation says about a model: estimators over the answers to a data set, and their uncertainty."""
