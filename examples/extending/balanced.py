"""A metric of your own: a function of a split's rows, as the task's `predictions` returns them; a number or a dict."""


def balanced_accuracy(rows):
    """Return the mean over the classes of the share of their samples that are predicted right."""
    from sklearn.metrics import balanced_accuracy_score

    return balanced_accuracy_score([row["label"] for row in rows], [row["prediction"] for row in rows])
