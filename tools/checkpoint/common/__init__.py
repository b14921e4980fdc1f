"""Parts shared by the checkpoint tools: paths, safe loading, publication, progress."""
