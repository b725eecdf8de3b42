"""One estimator for stragglers: hidden Markov chains over slowdown levels, and one rule that decides by them.

    estimator = StragglerEstimator.create(layout)                # of one membership
    estimator = estimator.observe_metrics(window, now)           # each heartbeat's means; may want step windows
    estimator = estimator.observe_steps(step_window, now)        # the answer to a request
    proposal = propose_strategy(estimator, ...)                  # what to change now, if anything

`docs/architecture/estimator.md` has the model, its sources, and what was measured. All values are immutable: each
function returns a new one.
"""
