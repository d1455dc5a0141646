"""Extensions of beam-inference, one module for each kind."""
