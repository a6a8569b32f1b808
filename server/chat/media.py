"""Content that is not text, and the lines that stand for it where the model cannot read it.

Promises that a line depends on the type of the content only, so that a conversation which repeats it has the same beginning.
"""

# Types of content in OpenAI's and Anthropic's APIs, and what each is called.
MEDIA = {
    "audio": "An audio recording",
    "audio_url": "An audio recording",
    "computer_screenshot": "A screenshot",
    "container_upload": "A file",
    "document": "A document",
    "file": "A file",
    "image": "An image",
    "image_file": "An image",
    "image_url": "An image",
    "input_audio": "An audio recording",
    "input_file": "A file",
    "input_image": "An image",
    "input_video": "A video",
    "video": "A video",
    "video_url": "A video",
}
PICTURES = ("image", "image_url", "input_image")


def placeholder(content_type: str) -> str:
    """The line that stands for content of one of the types MEDIA."""
    return f"[{MEDIA[content_type]} was left out: this model reads text only.]"
