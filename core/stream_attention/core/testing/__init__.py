"""What tests and benches share: one tolerance, one hostile list, problems as data, route checks."""
