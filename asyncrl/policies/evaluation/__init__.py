"""Results of an evaluation: estimators over the answers to a data set, and their uncertainty."""
