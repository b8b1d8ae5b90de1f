"""Your own data with labels you do not trust: fit a model, predict, and find the wrong labels.

model = fit("train.csv", label="kind")
model.predict("new.csv")
model.issues
"""

from logitclip.own_data.fitting import find_issues, fit
from logitclip.own_data.model import Model, load

__all__ = ["Model", "find_issues", "fit", "load"]
