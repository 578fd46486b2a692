"""Subjects and forms of the chats."""

QUESTIONS = (
    "What is {}?",
    "How does {} work?",
    "Explain {} to a ten-year-old.",
    "Why is {} important?",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me a short history of {}.",
    "What should a beginner know about {}?",
    "Answer in two sentences: how is {} used today?",
    "What are common mistakes people make with {}?",
)
TOPICS = (
    "photosynthesis", "the stock market", "solar power", "the water cycle", "machine learning", "the Roman Empire",
    "vaccination", "inflation", "the human heart", "black holes", "public transport", "bread baking", "coffee roasting",
    "the printing press", "plate tectonics", "recycling", "electric cars", "meditation", "the internet", "chess",
    "gravity", "compound interest", "beekeeping", "jazz", "the Great Wall of China", "weather forecasting", "sleep",
    "antibiotics", "nuclear power", "the French Revolution", "gardening", "swimming", "the violin", "batteries",
    "a balanced diet", "tides", "democracy", "the Silk Road", "satellites", "glass making", "insurance", "poetry",
    "marathon training", "the moon landing", "databases", "encryption", "volcanoes", "coral reefs", "time zones",
    "a home mortgage", "wind turbines", "impressionism", "fermentation", "the Amazon rainforest", "first aid",
    "public speaking", "the periodic table", "origami", "the Olympic Games", "bicycle maintenance", "genetics",
    "open-source software", "the Nile", "noise cancelling", "the immune system", "a good night routine",
)  # fmt: skip
WRITINGS = (
    "Write a short story about {}.",
    "Write a poem of eight lines about {}.",
    "Write a polite email about {}.",
    "Write a product description for {}.",
    "Make a list of ten ideas for {}.",
    "Write a step-by-step guide to {}.",
    "Write a dialogue between two friends about {}.",
    "Write the first paragraph of a blog post about {}.",
    "Draft a short speech about {}.",
    "Give me a weekly plan for {}.",
    "Write three catchy titles for an article about {}.",
)
SCENES = (
    "a lost umbrella", "moving to a new city", "learning to cook", "a broken washing machine", "a day at the beach",
    "starting a small bakery", "an old lighthouse", "a late train", "tomatoes on a balcony", "a surprise party",
    "teaching a dog to sit", "a cancelled meeting", "a wooden toy train", "travelling with children", "a rainy Sunday",
    "saving money for a holiday", "a noisy neighbour", "the first snow of the year", "learning the guitar",
    "a walk in the forest", "an interview for a new job", "a lunch box for school", "a robot that likes painting",
    "changing a bicycle tyre", "a trip to the museum", "a hand-made notebook", "organising a book club",
    "a lost cat that comes home", "running a first 10 km race", "a garden in the desert", "a return of damaged goods",
    "a letter to a grandmother", "a camping weekend", "a new library in town", "writing better notes",
)  # fmt: skip
CHANGES = (
    "Correct the spelling and grammar of this text:",
    "Rewrite this text in a formal tone:",
    "Rewrite this text so that it is shorter:",
    "Turn this text into a list of bullet points:",
    "Translate this text into French:",
    "Translate this text into German:",
    "List all names, places and dates in this text:",
    "Rewrite this text in the past tense:",
    "Which tasks does this text mention, and who has to do them?",
    "Write this text as a friendly email:",
    "Answer with a JSON object with the keys who, what and when for this text:",
    "Repeat this text word for word, but write all numbers as words:",
)
NOTES = (
    "The meeting with the Hamburg team is moved from Tuesday to Thursday at 3 pm. Anna brings the slides, Tom "
    "books the room, and everyone sends their figures by Wednesday noon.",
    "hi marta, i has lost my key yesterday in the gym, maybe you seen it? it have a red ribbon. i come by tomorow at 5",
    "Our shop in Lisbon opens on 4 March 2024. We sell 120 kinds of tea, 30 of them from small farms in Nepal. "
    "On the first day every visitor gets a cup for free.",
    "The museum of Leeds shows 85 paintings by Clara Whitfield until 30 June. Tickets cost 12 pounds, for "
    "students 7. On Mondays the museum is closed.",
    "Please do not park in front of the gate. The fire brigade needs the space, and the bins are emptied there "
    "every Friday morning at six. Cars that stand there will be towed.",
    "Yesterday the river rose by two metres. The school in Millbrook stays closed until Monday, and the bus "
    "number 14 takes the road over the hill. Mr Okafor asks for volunteers who fill sandbags.",
    "the new laptop are very fast and the screen is beautifull, but the battery only last four hour and the "
    "fan is loud when i playing games. for the price of 899 dollar i expected more",
    "Maria Lopez was born in Valencia in 1968. She studied chemistry in Madrid, worked in Boston for nine "
    "years, and founded her company Solvanta in 2004. Today it employs 340 people.",
    "Mix 250 grams of flour with 2 eggs, a pinch of salt and half a litre of milk. Let it rest for 30 minutes. "
    "Bake thin pancakes in a hot pan, one minute a side, and serve them with apple sauce.",
    "The train from Vienna to Prague leaves at 7:10 and arrives at 11:18. Passengers with bicycles need a "
    "reservation. In Brno there is a stop of eight minutes.",
    "We regret that order 55-2081 is delayed. The blue lamp is out of stock until 12 May. You can wait, choose "
    "the green lamp, or have your 64 euros back. Write to Ms Berg by Friday.",
    "Nobody knows who built the stone circle on the island of Farrow. It has 31 stones, the tallest of them "
    "five metres high. In 1931 Professor Ellis found a copper axe there that is 4,000 years old.",
    "In the first quarter sales rose by 8 percent to 2.4 million euros. Costs stayed at 1.9 million. The board "
    "plans to hire six engineers in Porto and to close the office in Ghent in September.",
    "Dear neighbours, on Saturday we celebrate the 70th birthday of my father in the yard. It may be loud "
    "until eleven. You are all welcome for cake at four. Yours, Fatima and Joris from the second floor",
    "The patient, a man of 54, came on 3 January with pain in the left knee. Dr Shah found a swelling and "
    "prescribed rest for ten days. A second visit is planned for 14 January.",
    "Version 3.2 fixes the crash when a file is empty, adds dark mode, and starts twice as fast. Thanks to "
    "Lena for the icons and to Raj for forty bug reports. The next release comes in October.",
)
READINGS = (
    "Summarize this article in three sentences:",
    "Summarize this text in one sentence:",
    "What are the key points of this article? Answer with a list.",
    "Write a headline for this article:",
    "Who is mentioned in this text, and what did they do?",
    "Which numbers does this text give, and what do they mean?",
    "Ask and answer three questions about this text:",
    "Explain this text to a child:",
    "Rewrite this text for a newspaper of two lines:",
    "List the places and times in this text:",
)
CODE_FORMS = (
    "Write a Python function that {}.",
    "Write a Python function that {}, with type hints and a docstring.",
    "Show me how to {} in Python, with an example.",
    "Write a unit test for a Python function that {}.",
    "Write a JavaScript function that {}.",
)
JOBS = (
    "counts the vowels of a string", "reverses the words of a sentence", "merges two sorted lists",
    "checks whether a year is a leap year", "removes duplicates from a list", "computes the median of a list",
    "converts Celsius to Fahrenheit", "finds the longest word of a text", "flattens a nested list",
    "reads a CSV file into dictionaries", "returns the n-th Fibonacci number", "tests whether a number is prime",
    "groups words by their first letter", "rotates a matrix by 90 degrees", "finds the most frequent item",
    "parses a date of the form 2024-05-31", "splits a list into chunks of n items", "computes a factorial",
    "checks whether brackets are balanced", "sums the digits of a number", "sorts a dictionary by its values",
    "finds all files with a suffix below a folder", "counts the lines of a file", "inverts a dictionary",
    "returns the second largest number", "encodes text with a Caesar cipher", "computes the dot product of two lists",
    "validates an email address", "computes the average of each column", "finds the common items of two lists",
    "capitalizes every sentence", "draws a triangle of stars", "searches a sorted list by bisection",
    "counts how often each word occurs", "finds missing numbers in a range", "transposes a table",
)  # fmt: skip
CODE_CHANGES = (
    "Explain what this function does:",
    "Add type hints to this function:",
    "Write a docstring for this function:",
    "Rename the variables of this function so that they are clearer:",
    "Find possible errors in this function:",
    "Write three tests for this function:",
)
PROBLEMS = (
    "{name} buys {a} apples for {b} cents each and pays with a ten-dollar note. How much change does {name} get?",
    "A train travels {a} kilometres an hour for {b} hours, then {c} kilometres more. How far does it travel?",
    "{name} reads {a} pages a day. How many pages does {name} read in {b} days, and how many are left of 2,000?",
    "A box holds {a} rows of {b} eggs. {c} eggs are broken. How many whole eggs are in {name}'s box?",
    "{name} earns {a} dollars an hour and works {b} hours a week. How much is that in {c} weeks?",
    "{name} is {a} years older than a sister who is {b}. How old will {name} be in {c} years?",
    "A garden is {a} metres long and {b} metres wide. How long is its fence, and how large is its area?",
    "{name} has {a} stamps, gets {b} more and gives {c} away. How many stamps are left?",
    "A recipe for {a} people needs {b} grams of rice. How much rice does {name} need for {c} people?",
    "Solve for x: {a}x + {b} = {c}. Show your work.",
    "What is {a} percent of {b}0? Explain each step.",
    "Compute {a} * {b} + {c} step by step.",
)
NAMES = (
    "Lena", "Omar", "Priya", "Jonas", "Mei", "Carlos", "Aisha", "Peter", "Nora", "Kofi", "Sofia", "Ivan", "Yuki",
)  # fmt: skip
OPENINGS = tuple(
    form.format(topic)
    for form in ("Tell me about {}.", "Write a short paragraph about {}.", "Give me four tips on {}.")
    for topic in TOPICS[::3]
)
FOLLOW_UPS = (
    "Make it shorter.",
    "Rewrite it for a child.",
    "Turn it into a list.",
    "Which of these points matters most, and why?",
    "Translate it into Spanish.",
    "Write it again, more formally.",
    "Give an example.",
)
