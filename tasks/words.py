"""Word lists of the needle task.

Keys and values are disjoint, lower-case-distinct and concrete, so that no value can be guessed from its key.
"""

from __future__ import annotations

KEYS = tuple(
    """
    Amsterdam Ankara Athens Auckland Baltimore Bangkok Barcelona Belgrade Berlin Bogota Boston Brisbane Brussels
    Bucharest Budapest Calgary Caracas Chicago Copenhagen Dallas Denver Detroit Dublin Edinburgh Frankfurt Geneva
    Glasgow Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Johannesburg Karachi Kingston Lagos Lima Lisbon
    Liverpool London Madrid Manchester Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples
    Osaka Oslo Ottawa Paris Philadelphia Phoenix Prague Quebec Reykjavik Rotterdam Santiago Seattle Seoul Shanghai
    Singapore Stockholm Sydney Taipei Tokyo Toronto Toulouse Valencia Vancouver Venice Vienna Warsaw Zagreb Zurich
    """.split()
)

VALUES = tuple(
    """
    accordion almanac avocado backpack badminton balloon banjo barometer bicycle binocular biscuit blueberry boomerang
    broccoli bulldozer butterfly cactus calendar camera caramel caravan carousel cartoon cashew cathedral cello
    chandelier chimney chocolate cinema clarinet coconut compass cricket crystal cupboard cushion custard diary
    dictionary dinosaur dolphin domino dragonfly elevator emerald engine envelope escalator factory falcon ferry
    flamingo flannel fountain gallery garage ginger giraffe glacier gondola gorilla guitar hammock handbag harmonica
    hazelnut hedgehog helicopter hockey igloo iguana jaguar jasmine jigsaw kangaroo kayak kettle kiosk ladder lantern
    laptop lavender lemonade leopard library lobster locomotive magnet mandolin mango marathon marble marmalade
    meadow melody microphone microscope mosaic muffin mushroom napkin noodle nutmeg oatmeal octopus omelette orchard
    orchestra origami oyster paddle pancake panther paprika parachute parrot peanut pelican pencil penguin piano pillow
    pineapple planet plastic platypus pocket polka postcard potato pretzel puppet puzzle pyramid quartz rabbit radar
    radio rainbow raspberry robot rocket saddle safari salmon sandwich satellite saxophone scooter shuttle skateboard
    slipper snorkel spaghetti spinach squirrel stadium sundial sunflower surfboard telescope tennis theater thermos
    toaster tomato tornado tractor trampoline trombone trumpet tulip tunnel turbine turtle umbrella unicycle vanilla
    velvet violin volcano waffle walnut walrus waterfall whistle windmill xylophone yacht zebra zeppelin zucchini
    """.split()
)
