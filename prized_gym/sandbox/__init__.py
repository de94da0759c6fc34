"""What all sandbox engines share. A provider is a `driver.Driver` that makes `driver.Sandbox` objects; its engine is a subclass
of `engine.SandboxEngine` of a few lines, as `prized_gym.engines.gvisor` shows."""
