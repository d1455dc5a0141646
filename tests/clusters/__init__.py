"""Real clusters of Flink and Spark on this machine, for tests."""
