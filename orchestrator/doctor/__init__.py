"""`action=doctor`: measures this machine and the configured tiers, and says what to mend."""
