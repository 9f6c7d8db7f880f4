"""The bytes of exchanges on the wire, and the time they take on a link."""
