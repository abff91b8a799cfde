"""Models of random weights at their published sizes: the work of a checkpoint, and no speech."""
