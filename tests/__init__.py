"""The tests; folders mirror fxpipe/ and passes/, tests/golden/ mirrors tests/."""
