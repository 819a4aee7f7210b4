"""`expert-net bench`: how fast a model runs here, and what each part of that costs."""
