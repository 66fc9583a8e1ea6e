"""Plans a job without running it: layouts, bytes and estimated times, for meshes of any size."""
