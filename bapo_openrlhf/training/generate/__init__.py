"""Generate: prompts go to the engines, and responses come back as samples and groups."""
