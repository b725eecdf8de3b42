"""The main scenario, live: a training job on a real cluster recovers from one fault after the other."""
