"""What the tests of every executor share: cases with hostile pools, and each flow's formula."""
