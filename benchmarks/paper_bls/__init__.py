"""The evaluation of the bounded-lag paper, figure by figure."""
