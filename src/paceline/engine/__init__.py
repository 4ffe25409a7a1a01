"""Request lifecycle: admission, scheduling (pure logic), the step loop and its clients."""
