"""What planning tells: results, explanations, and files of plans."""
