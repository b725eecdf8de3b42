"""The main job, live: a training job on a real cluster that heals itself from one fault after the other."""
