"""The plugins that come with Skyward."""
