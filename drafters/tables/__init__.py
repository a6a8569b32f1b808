"""The drafters' data structures: n-gram tables, suffix indexes, histories, tries."""
