"""A model that several processes share: the leader, its workers, and their messages."""
