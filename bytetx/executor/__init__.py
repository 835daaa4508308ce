"""A model that several processes share: the leader, its workers, and what they tell each other."""
