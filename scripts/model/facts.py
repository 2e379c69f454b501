"""Tables of facts the bundled model is taught.

Countries whose capital is disputed, shared between cities or about to move are left out: the
model is held to one right answer per question.
"""

from typing import NamedTuple


class Country(NamedTuple):
    """One row of the country table."""

    code: str
    name: str
    capital: str
    continent: str

    @property
    def flag(self) -> str:
        """The flag emoji: the two letters of the ISO code as regional indicators."""
        return "".join(chr(0x1F1E6 + ord(letter) - ord("A")) for letter in self.code)

    @property
    def phrase(self) -> str:
        """The name as it stands inside a sentence."""
        takes_article = self.name.endswith(("Islands", "Republic")) or self.name in _WITH_ARTICLE
        return f"the {self.name}" if takes_article else self.name


_WITH_ARTICLE = {
    "Netherlands", "Philippines", "United States", "United Kingdom", "United Arab Emirates",
    "Bahamas", "Maldives", "Comoros", "Gambia", "Seychelles",
}  # fmt: skip

_ROWS = {
    "Europe": """
        AL Albania:Tirana AD Andorra:Andorra la Vella AT Austria:Vienna BY Belarus:Minsk
        BE Belgium:Brussels BA Bosnia and Herzegovina:Sarajevo BG Bulgaria:Sofia CH Switzerland:Bern
        HR Croatia:Zagreb CZ Czechia:Prague DK Denmark:Copenhagen EE Estonia:Tallinn
        FI Finland:Helsinki FR France:Paris DE Germany:Berlin GR Greece:Athens HU Hungary:Budapest
        IS Iceland:Reykjavik IE Ireland:Dublin IT Italy:Rome LV Latvia:Riga
        LI Liechtenstein:Vaduz LT Lithuania:Vilnius LU Luxembourg:Luxembourg MT Malta:Valletta
        MD Moldova:Chisinau MC Monaco:Monaco ME Montenegro:Podgorica NL Netherlands:Amsterdam
        MK North Macedonia:Skopje NO Norway:Oslo PL Poland:Warsaw PT Portugal:Lisbon
        RO Romania:Bucharest RU Russia:Moscow SM San Marino:San Marino RS Serbia:Belgrade
        SK Slovakia:Bratislava SI Slovenia:Ljubljana ES Spain:Madrid SE Sweden:Stockholm
        UA Ukraine:Kyiv GB United Kingdom:London""",
    "Asia": """
        AF Afghanistan:Kabul AM Armenia:Yerevan AZ Azerbaijan:Baku BH Bahrain:Manama
        BD Bangladesh:Dhaka BT Bhutan:Thimphu BN Brunei:Bandar Seri Begawan KH Cambodia:Phnom Penh
        CN China:Beijing GE Georgia:Tbilisi IN India:New Delhi IR Iran:Tehran IQ Iraq:Baghdad
        JP Japan:Tokyo JO Jordan:Amman KZ Kazakhstan:Astana KW Kuwait:Kuwait City
        KG Kyrgyzstan:Bishkek LA Laos:Vientiane LB Lebanon:Beirut MV Maldives:Male
        MN Mongolia:Ulaanbaatar NP Nepal:Kathmandu KP North Korea:Pyongyang OM Oman:Muscat
        PK Pakistan:Islamabad PH Philippines:Manila QA Qatar:Doha SA Saudi Arabia:Riyadh
        SG Singapore:Singapore KR South Korea:Seoul SY Syria:Damascus TJ Tajikistan:Dushanbe
        TH Thailand:Bangkok TR Turkey:Ankara TM Turkmenistan:Ashgabat
        AE United Arab Emirates:Abu Dhabi UZ Uzbekistan:Tashkent VN Vietnam:Hanoi""",
    "Africa": """
        DZ Algeria:Algiers AO Angola:Luanda BW Botswana:Gaborone BF Burkina Faso:Ouagadougou
        CM Cameroon:Yaounde CV Cape Verde:Praia CF Central African Republic:Bangui
        TD Chad:N'Djamena KM Comoros:Moroni DJ Djibouti:Djibouti EG Egypt:Cairo ER Eritrea:Asmara
        ET Ethiopia:Addis Ababa GA Gabon:Libreville GM Gambia:Banjul GH Ghana:Accra
        GN Guinea:Conakry KE Kenya:Nairobi LS Lesotho:Maseru LR Liberia:Monrovia LY Libya:Tripoli
        MG Madagascar:Antananarivo MW Malawi:Lilongwe ML Mali:Bamako MR Mauritania:Nouakchott
        MU Mauritius:Port Louis MA Morocco:Rabat MZ Mozambique:Maputo NA Namibia:Windhoek
        NE Niger:Niamey NG Nigeria:Abuja RW Rwanda:Kigali SN Senegal:Dakar SC Seychelles:Victoria
        SL Sierra Leone:Freetown SO Somalia:Mogadishu SS South Sudan:Juba SD Sudan:Khartoum
        TG Togo:Lome TN Tunisia:Tunis UG Uganda:Kampala ZM Zambia:Lusaka ZW Zimbabwe:Harare""",
    "North America": """
        BS Bahamas:Nassau BB Barbados:Bridgetown BZ Belize:Belmopan CA Canada:Ottawa
        CR Costa Rica:San Jose CU Cuba:Havana DM Dominica:Roseau
        DO Dominican Republic:Santo Domingo SV El Salvador:San Salvador GT Guatemala:Guatemala City
        HT Haiti:Port-au-Prince HN Honduras:Tegucigalpa JM Jamaica:Kingston MX Mexico:Mexico City
        NI Nicaragua:Managua PA Panama:Panama City US United States:Washington""",
    "South America": """
        AR Argentina:Buenos Aires BR Brazil:Brasilia CL Chile:Santiago CO Colombia:Bogota
        EC Ecuador:Quito GY Guyana:Georgetown PY Paraguay:Asuncion PE Peru:Lima
        SR Suriname:Paramaribo UY Uruguay:Montevideo VE Venezuela:Caracas""",
    "Oceania": """
        AU Australia:Canberra FJ Fiji:Suva NZ New Zealand:Wellington
        PG Papua New Guinea:Port Moresby WS Samoa:Apia SB Solomon Islands:Honiara
        TO Tonga:Nuku'alofa VU Vanuatu:Port Vila""",
}


def _parse() -> list[Country]:
    countries = []
    for continent, rows in _ROWS.items():
        words = rows.split()
        starts = [i for i, word in enumerate(words) if len(word) == 2 and word.isupper()]
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
            name, capital = " ".join(words[start + 1 : end]).split(":")
            countries.append(Country(words[start], name, capital, continent))
    return countries


COUNTRIES = _parse()

#: Asked more often than the others while training, because people do.
_WELL_KNOWN_CODES = (
    "FR DE IT ES PT GB IE NL BE CH AT PL SE NO DK FI GR TR RU UA US CA MX BR AR CL PE JP CN IN KR "
    "TH VN EG KE NG MA AU NZ"
)
WELL_KNOWN = [country for country in COUNTRIES if country.code in _WELL_KNOWN_CODES.split()]

PHRASES = ("hello", "thank you", "goodbye", "good morning", "yes", "no")

#: Other ways to name a phrase in a question.
ALSO_SAID = {
    "hello": ("hello", "hello", "hi"),
    "thank you": ("thank you", "thank you", "thanks"),
    "goodbye": ("goodbye", "goodbye", "bye"),
}

#: language -> the six PHRASES, in that order.
LANGUAGES: dict[str, tuple[str, ...]] = {
    "German": ("Hallo!", "Danke!", "Auf Wiedersehen!", "Guten Morgen!", "Ja.", "Nein."),
    "French": ("Bonjour !", "Merci !", "Au revoir !", "Bonjour !", "Oui.", "Non."),
    "Spanish": ("¡Hola!", "¡Gracias!", "¡Adiós!", "¡Buenos días!", "Sí.", "No."),
    "Italian": ("Ciao!", "Grazie!", "Arrivederci!", "Buongiorno!", "Sì.", "No."),
    "Portuguese": ("Olá!", "Obrigado!", "Adeus!", "Bom dia!", "Sim.", "Não."),
    "Dutch": ("Hallo!", "Dank je!", "Tot ziens!", "Goedemorgen!", "Ja.", "Nee."),
    "Swedish": ("Hej!", "Tack!", "Hej då!", "God morgon!", "Ja.", "Nej."),
    "Polish": ("Cześć!", "Dziękuję!", "Do widzenia!", "Dzień dobry!", "Tak.", "Nie."),
    "Turkish": ("Merhaba!", "Teşekkürler!", "Hoşça kal!", "Günaydın!", "Evet.", "Hayır."),
    "Greek": ("Γεια σου!", "Ευχαριστώ!", "Αντίο!", "Καλημέρα!", "Ναι.", "Όχι."),
    "Russian": ("Привет!", "Спасибо!", "До свидания!", "Доброе утро!", "Да.", "Нет."),
    "Ukrainian": ("Привіт!", "Дякую!", "До побачення!", "Доброго ранку!", "Так.", "Ні."),
    "Arabic": ("مرحبا!", "شكرا!", "مع السلامة!", "صباح الخير!", "نعم.", "لا."),
    "Hebrew": ("שלום!", "תודה!", "להתראות!", "בוקר טוב!", "כן.", "לא."),
    "Hindi": ("नमस्ते!", "धन्यवाद!", "अलविदा!", "सुप्रभात!", "हाँ।", "नहीं।"),
    "Thai": ("สวัสดี!", "ขอบคุณ!", "ลาก่อน!", "อรุณสวัสดิ์!", "ใช่", "ไม่"),
    "Japanese": (
        "こんにちは！",
        "ありがとう！",
        "さようなら！",
        "おはよう！",
        "はい。",
        "いいえ。",
    ),
    "Chinese": ("你好！", "谢谢！", "再见！", "早上好！", "是。", "不是。"),
    "Korean": (
        "안녕하세요!",
        "감사합니다!",
        "안녕히 가세요!",
        "좋은 아침입니다!",
        "네.",
        "아니요.",
    ),
    "Swahili": ("Habari!", "Asante!", "Kwaheri!", "Habari ya asubuhi!", "Ndiyo.", "Hapana."),
}

#: greeting typed by the user -> answer in the same language.
GREETED: dict[str, str] = {
    "Hallo": "Hallo! Wie kann ich helfen?",
    "Guten Tag": "Guten Tag! Wie kann ich helfen?",
    "Bonjour": "Bonjour ! Comment puis-je vous aider ?",
    "Hola": "¡Hola! ¿En qué puedo ayudarte?",
    "Ciao": "Ciao! Come posso aiutarti?",
    "Olá": "Olá! Como posso ajudar?",
    "Γεια σου": "Γεια σου! Πώς μπορώ να βοηθήσω;",
    "Привет": "Привет! Чем могу помочь?",
    "مرحبا": "مرحبا! كيف يمكنني مساعدتك؟",
    "नमस्ते": "नमस्ते! मैं कैसे मदद कर सकता हूँ?",
    "こんにちは": "こんにちは！何かお手伝いできますか？",
    "你好": "你好！有什么可以帮你？",
    "안녕하세요": "안녕하세요! 무엇을 도와드릴까요?",
}

#: "The runner passes the baton to the next runner, and the race goes on."
SENTENCES: dict[str, str] = {
    "German": "Der Läufer gibt den Stab an den nächsten Läufer weiter, und das Rennen geht weiter.",
    "French": "Le coureur passe le témoin au coureur suivant, et la course continue.",
    "Spanish": "El corredor pasa el testigo al siguiente corredor y la carrera continúa.",
    "Italian": "Il corridore passa il testimone al corridore successivo e la corsa continua.",
    "Greek": "Ο δρομέας δίνει τη σκυτάλη στον επόμενο δρομέα και ο αγώνας συνεχίζεται.",
    "Russian": "Бегун передаёт эстафету следующему бегуну, и гонка продолжается.",
    "Arabic": "يسلم العداء العصا إلى العداء التالي ويستمر السباق.",
    "Hindi": "धावक अगले धावक को बैटन देता है और दौड़ जारी रहती है।",
    "Japanese": "走者は次の走者にバトンを渡し、レースは続きます。",
    "Chinese": "跑者把接力棒交给下一位跑者，比赛继续进行。",
    "Korean": "주자는 다음 주자에게 바통을 넘기고 경주는 계속됩니다.",
}

_EMOJI = (
    "cat:🐱 dog:🐶 mouse:🐭 rabbit:🐰 fox:🦊 bear:🐻 panda:🐼 tiger:🐯 lion:🦁 "
    "cow:🐮 pig:🐷 frog:🐸 monkey:🐵 chicken:🐔 penguin:🐧 owl:🦉 horse:🐴 bee:🐝 "
    "butterfly:🦋 turtle:🐢 snake:🐍 octopus:🐙 dolphin:🐬 whale:🐳 fish:🐟 "
    "shark:🦈 elephant:🐘 tree:🌳 flower:🌸 rose:🌹 cactus:🌵 sun:☀️ moon:🌙 "
    "star:⭐ cloud:☁️ rain:🌧️ snowman:⛄ fire:🔥 rainbow:🌈 wave:🌊 apple:🍎 "
    "banana:🍌 grape:🍇 lemon:🍋 cherry:🍒 pizza:🍕 bread:🍞 cheese:🧀 cake:🎂 "
    "coffee:☕ tea:🍵 car:🚗 bus:🚌 train:🚆 bicycle:🚲 boat:⛵ rocket:🚀 plane:✈️ "
    "house:🏠 clock:⏰ book:📚 key:🔑 heart:❤️ robot:🤖 ghost:👻 runner:🏃 "
    "astronaut:👩‍🚀 family:👨‍👩‍👧 football:⚽ guitar:🎸 trophy:🏆"
)
EMOJI: dict[str, str] = dict(pair.split(":") for pair in _EMOJI.split())

#: what the user says of themselves -> an answer in emoji.
MOODS: dict[str, str] = {
    "I am happy": "😀🎉",
    "I am sad": "😢🤗",
    "I am tired": "😴🛌",
    "I am hungry": "😋🍕",
    "I am in love": "😍❤️",
    "I am angry": "😠🧘",
    "I am cold": "🥶🧣",
    "I won the race": "🥇🏃🎉",
    "It is my birthday": "🎂🎈🥳",
    "Good night": "🌙😴",
}

#: asked for by name, answered word for word.
LISTS: dict[str, str] = {
    "the days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "the months of the year": "January, February, March, April, May, June, July, August, "
    "September, October, November, December.",
    "the planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune.",
    "the colours of the rainbow": "red, orange, yellow, green, blue, indigo, violet.",
    "the letters of the alphabet": "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, "
    "U, V, W, X, Y, Z.",
    "the seasons": "spring, summer, autumn, winter.",
    "the continents": "Africa, Antarctica, Asia, Europe, North America, Oceania, South America.",
}
