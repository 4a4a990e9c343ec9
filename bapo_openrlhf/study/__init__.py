"""A study: methods, advantage paths and seeds on one task, and what they show together."""
