"""`kconsume check`: the handlers of an app, their guarantees, and problems of its configuration."""
