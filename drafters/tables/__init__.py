"""The data structures that drafters read and learn: n-gram tables, suffix indexes, histories, tries."""
