"""What perturbations write into a prompt: system prompts, template formats, instructions, earlier turns. All in own words.

The formats are written from their public descriptions (ChatML; Llama-3 header tokens; Gemma turns; Mistral instructions). None
writes a BOS: a prompt keeps the one it has, so that a foreign format is one change. Gemma and Mistral know no system role: a
system message stands before the first user message.
"""

from __future__ import annotations

#: several system messages, each as its own; the long one is about 230 words
SYSTEMS = {
    "empty": "",
    "foreign": (
        "Du bist ein hilfsbereiter Assistent. Antworte genau und freundlich, und sage es, wenn du etwas nicht weißt."
    ),
    "long": " ".join(
        [
            "You answer questions for the readers of a public library.",
            "Read the whole question before you begin.",
            "Say first what was asked, in one short sentence, if the question is longer than a paragraph.",
            "Give the answer next, and the reasons after it.",
            "Use plain words, and explain a technical term where it first occurs.",
            "Keep sentences short, and put one thought into each.",
            "Write numbers with their units.",
            "Do not round a number unless the reader asks for an estimate, and say so when you do.",
            "If a calculation is needed, show its steps in order.",
            "If the question has several parts, answer them in the order in which they were asked.",
            "If a part cannot be answered, say which one and why.",
            "Do not guess names, dates or sources.",
            "Do not repeat the question word for word.",
            "Do not praise the reader or the question.",
            "Program code goes into a block of its own, complete and ready to run.",
            "Comment code only where a reader would wonder about the reason.",
            "Lists are for things that are really a list; everything else is written in sentences.",
            "A table is useful where two or more things are compared by the same properties.",
            "Be polite when you decline, and offer what you can do instead.",
            "Never ask for personal data.",
            "If the reader writes in another language, answer in that language.",
            "Stop when the answer is complete.",
        ]
    ),
    "ood": (
        "0x7f3a::qq|;;~~ 91 91 91 { tau_k } //zxv\t#### lorem:3,1,4,1,5,9 <<NULL>> ]]][[[ vbn-vbn-vbn %%d %%s \\\\u0000 "
        "FRAGMENT 18/??/07 @@@ mxm mxm ;end;; 4e5f 60 61 62 aAaAaA ___ (((("
    ),
}

#: name: (what its own users' templates contain, template)
FORMATS = {
    "chatml": (
        "<|im_start|>",
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama3": (
        "<|start_header_id|>",
        "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "gemma": (
        "<start_of_turn>",
        "{% set ns = namespace(before='') %}{% for m in messages %}{% if m['role'] in ('system', 'developer') %}"
        "{% set ns.before = ns.before + m['content'] + '\n\n' %}{% else %}"
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ ns.before }}{{ m['content'] }}"
        "<end_of_turn>\n{% set ns.before = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    "mistral": (
        "[INST]",
        "{% set ns = namespace(before='') %}{% for m in messages %}{% if m['role'] in ('system', 'developer') %}"
        "{% set ns.before = ns.before + m['content'] + '\n\n' %}{% elif m['role'] == 'assistant' %}"
        " {{ m['content'] }}</s>{% else %}[INST] {{ ns.before }}{{ m['content'] }} [/INST]"
        "{% set ns.before = '' %}{% endif %}{% endfor %}",
    ),
}

#: an instruction in the language; the question itself stays as it is, since nothing here translates
LANGUAGES = {
    "ar": "أجب باللغة العربية من فضلك.",
    "de": "Bitte antworte auf Deutsch.",
    "es": "Responde en español, por favor.",
    "fr": "Réponds en français, s'il te plaît.",
    "hi": "कृपया हिन्दी में उत्तर दें।",
    "ja": "日本語で答えてください。",
    "ru": "Пожалуйста, ответь по-русски.",
    "zh": "请用中文回答。",
}

#: names of the roles in place of user and assistant
ROLE_NAMES = {
    "human": {"user": "human", "assistant": "ai"},
    "capital": {"user": "User", "assistant": "Assistant"},
}

#: earlier exchanges, used in this order and again from the first
EXCHANGES = (
    ("What colour is a ripe banana?", "A ripe banana is yellow."),
    ("How many days does a week have?", "A week has seven days."),
    ("Name one animal that lives in the sea.", "The dolphin lives in the sea."),
    ("What do you get when water freezes?", "When water freezes, you get ice."),
    ("Which is larger, a mouse or a horse?", "A horse is larger than a mouse."),
    ("What is the opposite of cold?", "The opposite of cold is hot."),
)

#: answer to every earlier message of a long conversation, and the most words of such a message
REPLY, MESSAGE_WORDS = "Thank you, I have read this. What is your question?", 80
