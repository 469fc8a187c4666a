"""What happens to a record that fails: decisions as pure values; the runtime carries them out."""
